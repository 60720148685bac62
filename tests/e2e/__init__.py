"""Tests of the whole product as its users meet it: real processes, real sockets, real signals."""
