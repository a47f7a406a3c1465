"""Times, memory and errors of single operators, compared with their peers."""
