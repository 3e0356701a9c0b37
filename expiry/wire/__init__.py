"""The wire: what requests say, what answers say, how refusals are named. No HTTP happens here.

The API validates by these models and describes itself by them; the client reads answers with them.
"""
