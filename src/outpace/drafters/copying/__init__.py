"""Drafters that copy from text: prompt, output, references, earlier outputs."""
