"""Statements of papers, and the tables and pictures of README and docs, from recorded results."""
