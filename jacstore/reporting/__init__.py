"""What there is, for people to look at: one page about a store or a kernel, and lists of what lies in a folder.

`facts` reads what the page shows, `charts` draw it as SVG and PNG, `page` puts it into one HTML file. `listing` lists
stores and kernels of a folder and compares two of them. Nothing is
computed here that others could read from the store or kernel in another way.
"""
