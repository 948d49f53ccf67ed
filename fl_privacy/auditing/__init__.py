"""Audits of third-party Flower apps and strategies: run or watched, attacked in scenarios, on one page."""
