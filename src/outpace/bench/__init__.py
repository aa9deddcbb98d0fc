"""The benchmark: suites of prompts, methods run in turns, statistics, a table."""
