"""Printers: programs and the vectors between them, as C++ and as Triton."""
