"""How a number is taken: clocks, memory and peaks."""
