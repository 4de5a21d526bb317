"""Paged key-value memory: block ownership on the host, block contents on the device."""
