"""Support that several drafters share: growing trees, shapes of trees, draws, vocabularies, caches."""
