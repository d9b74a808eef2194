"""Everything about the paper's experiments: data sets, tables, figures, search and report.

This is the only room of the house that knows the paper's tables; nothing outside it imports from here.
"""
