"""Real engines on a CPU, several in one process and stepped by hand: what a cell of T3 runs in its process."""
