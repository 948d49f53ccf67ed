"""Work on several GPUs or machines through Ray, which is imported when it is asked for."""
