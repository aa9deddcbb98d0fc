"""Models of transformers as targets: decoders, encoder-decoders and models with images."""
