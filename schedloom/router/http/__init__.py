"""HTTP/1.1 to clients and to engines, nothing between it and the sockets."""
