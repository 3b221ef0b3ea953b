"""Storage: who owns which index, and the memory behind it."""
