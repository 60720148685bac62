"""Processes talking: messages, their codec, trio sockets over ZeroMQ, the handshake, rank streams and the client."""
