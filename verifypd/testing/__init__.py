"""Fakes that ship with the library: parts with the real ones' interface and none of their cost."""
