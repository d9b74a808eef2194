"""The paper's tabular experiments: search, tables, figures and report; every run is kept in a results store."""
