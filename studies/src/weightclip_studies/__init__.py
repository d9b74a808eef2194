"""The experiments behind weightclip: data sets, the paper's algorithms as printed, tables, images, benchmarks, audits.

A package of its own beside the library, which never imports from here. ``weightclip-study --help`` lists the commands.
"""
