"""What is the network, on one device?"""
