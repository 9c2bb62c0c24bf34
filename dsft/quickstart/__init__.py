"""What `dsft demo-data` and `dsft quickstart` write: the maker of the data, and files."""
