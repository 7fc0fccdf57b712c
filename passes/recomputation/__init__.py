"""Restore values of the forward in the backward, by recomputation or from the host, instead of keeping them.

Words of the search: a *site* is a node of the program, or one of its outputs. A *link* joins a result of one site
(tail) to the site that reads the result (head). A *variable* is one decision for all sites that are alike, and its
*options* are their strategies. A *choice* has one option for each variable.
"""
