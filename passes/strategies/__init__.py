"""The strategies of each node of a program, their prices, and the nodes that are alike."""
