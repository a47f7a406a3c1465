"""Times, memory and errors of single operators, beside their peers."""
