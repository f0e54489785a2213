"""Reports: run folders in, one self-contained HTML page out, the same as Markdown, and its pictures as SVG and PNG.

It reads run folders only and trains, evaluates and measures nothing. records.py reads, families.py sorts, times.py and
study.py compute, sections/ decide what is said, figures/ draw, page.py and markdown.py write;
paper/ writes up the paper's experiments.
"""
