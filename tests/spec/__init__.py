"""Tests of spec: values, tables and files."""
