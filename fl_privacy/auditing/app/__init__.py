"""Any Flower app, as it is: run in this process, looked on from both sides, attacked by its own code's answers."""
