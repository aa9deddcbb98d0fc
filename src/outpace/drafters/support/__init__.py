"""Support that several drafters share: growing trees, shapes of trees, draws, vocabularies, caches.

It is a package of its own because drafters never import each other.
"""
