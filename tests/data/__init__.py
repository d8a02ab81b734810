"""Tests of data: files, tokens, stores and the order of samples."""
