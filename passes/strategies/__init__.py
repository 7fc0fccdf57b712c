"""The strategies of every node of a program, what they cost, and which nodes are alike."""
