"""Scripts run by the Python of other environments; they import nothing from outpace."""
