"""Scripts that other environments' Pythons run; they import nothing of outpace."""
