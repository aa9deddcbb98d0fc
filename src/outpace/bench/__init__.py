"""The benchmark: suites of prompts, methods run in turns, statistics, the roof, the report."""
