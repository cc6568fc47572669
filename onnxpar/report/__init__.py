"""What `inspect`, `shard` and `ops` show, as plain data, and the page of `report`.

Takes programs, plans and the table of operators, or a directory; gives dictionaries that print as
JSON. Begin with `inspect_data`; with `page_data` for the page.
"""
