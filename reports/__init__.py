"""What people read: the record schema, and the tables and files derived from records."""
