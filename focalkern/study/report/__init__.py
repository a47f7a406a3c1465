"""The report of a study: text, tables, JSON and CSV, pictures and a page of HTML."""
