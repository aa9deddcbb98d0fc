"""Deciding how much to draft: measured costs, measured acceptance, and the governor that weighs them."""
