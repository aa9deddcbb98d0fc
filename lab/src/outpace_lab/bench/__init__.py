"""Measurements beyond a table: peers, grading, the roof, tuning, grown models, reports."""
