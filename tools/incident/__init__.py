"""`bandmaster incident`: everything an engineer elsewhere needs, in one archive, without what users wrote."""
