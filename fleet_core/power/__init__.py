"""Where the joules go: meters, the energy model of a board, and the book of joules per phase. No torch."""
