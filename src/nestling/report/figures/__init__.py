"""The pictures of a report, drawn by matplotlib: each a function from families to one small panel, or to None.

panel.py is what all share; the other files hold the figures of the section of the same name.
"""
