"""What drafters with a model of their own are made of: its cache, shapes of trees, other vocabularies."""
