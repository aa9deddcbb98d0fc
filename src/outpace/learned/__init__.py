"""What drafters that are trained and their training share: modules, batches, losses, folders."""
