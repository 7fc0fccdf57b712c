"""List and price the strategies of each node of a program, and find the nodes of repeated blocks that share them."""
