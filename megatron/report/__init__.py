"""A report of one or more runs: a self-contained HTML page that can be served while they train.

In reading order:

- `history`: the record of a run, with its curves, events, settings and expert load.
- `sources`: reading a history from the files of a run's folder.
- `timeline`: reading one iteration from the traces of `--profile`.
- `charts`: which curves share a chart, and how they are downsampled for the screen.
- `page`: the HTML page. Its files are in the folder `page`.
- `live`: the local server behind `--live`.
- `__main__`: the command line.
"""
