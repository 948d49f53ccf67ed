"""Audits of other people's Flower apps and strategies: run or watched, attacked in scenarios, on one page."""
