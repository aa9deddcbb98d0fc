"""Targets over several processes, one rank each."""
