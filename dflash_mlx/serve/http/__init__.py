"""Requests as they come over HTTP, and the replies: sockets, limits, who may ask. Knows no vendor's fields."""
