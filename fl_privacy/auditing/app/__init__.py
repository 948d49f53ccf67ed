"""Any unmodified Flower app: run in this process, observed on both sides, attacked through its own code."""
