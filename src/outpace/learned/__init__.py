"""Modules and folders that trained drafters share; outpace-lab trains them."""
