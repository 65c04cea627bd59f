"""Word lists behind the built-in base and its tasks. Invariant: within one list no word occurs twice."""

# ruff: noqa: SIM905 (word lists read better as text)

from typing import Final

NAMES: Final[tuple[str, ...]] = tuple(
    """
Mira Jonas Priya Tomas Aisha Lukas Yuki Elena Omar Ingrid Mateo Chloe Pavel Nadia Hugo Zara Felix Amara
Bruno Leila Oscar Hana Viktor Kofi Greta Rafael Mei Anton Dalia Enzo Freya Gustav Isla Jamal Katya Leon Maya
Nils Olga Pedro Quinn Rosa Samir Tara Umar Vera Walter Xenia Yara Zoltan Adele Boris Carmen Diego Edith
Farid Gloria Henrik Irina Jorge Kiran Lina Marco Noor Otto Petra Ravi Stella Tariq Ursula Vivek Wanda Yusuf
Zelda Arjun Bianca Cyrus Doris Emil Fatima Goran Helga Ivan Julia Kenji Lola Nora Orla Pablo Rita Sven Thea
Uma Vince Willow Yasmin Zeno Agnes Basil Clara Dmitri Elsa Fiona Gideon Harold Imani Jasper Kira Lorenzo
Monica Nestor Odette Percy Ruth Selma Theo Ulrich Violet Wesley Yvonne Zadie Abel Bella Conrad Delia Ezra
Flora Gavin Heidi Igor Joan Karim Linus Magda Noah Opal Piotr Rania Simon Tessa Ugo Valeria Wim Xavier
Yolanda Zack Astrid Bashir Cora Dante Esther Fabian Gwen Hassan Iris Jerome Kaya Louis Mabel Nikita Olive
Paolo Rufus Sonia Tobias Una Vlad Winona Ximena Yann Zuri Alma Bjorn Celia Darius Eva Fritz Gina Hector Ida
Jakob Karla Liam Marta Naomi Oren Pia Rex Sara Timo Ulla Vito Wren Yael Zita Ahmed
""".split()
)

CITIES: Final[tuple[str, ...]] = tuple(
    """
Oslo Lima Cairo Paris Tokyo Quito Accra Delhi Seoul Milan Boston Dublin Lagos Vienna Prague Madrid Berlin
Havana Nairobi Athens Lisbon Warsaw Bogota Manila Dakar Tunis Riga Turin Kyoto Denver Geneva Zurich Hanoi
Tehran Mumbai Ankara Bergen Dallas Austin Seville Porto Malmo Tampa Perth Hobart Darwin Leeds Bristol
Glasgow Cardiff Ghent Bruges Lyon Nice Toulouse Bremen Dresden Cologne Munich Graz Basel Bern Krakow Gdansk
Vilnius Tallinn Helsinki Turku Aarhus Uppsala Sofia Split Zagreb Skopje Izmir Beirut Amman Muscat Doha
Karachi Lahore Dhaka Kolkata Chennai Jaipur Yangon Phuket Osaka Nagoya Sapporo Busan Harbin Taipei Cebu
Davao Bali Suva Apia Cusco Sucre Santos Recife Natal Rosario Panama Merida Tijuana Calgary Halifax Toronto
Chicago Omaha Tulsa Reno Fresno Mobile Buffalo Detroit Rabat Oran Kumasi Durban Harare
""".split()
)

ACTIONS: Final[tuple[str, ...]] = ("ordered", "bought", "sold", "lost", "found", "returned", "painted", "packed")

ITEMS: Final[tuple[str, ...]] = tuple(
    """
lamps chairs books kettles violins carpets mirrors candles drums baskets ladders clocks umbrellas hammers
pillows teapots kites boots hats maps bottles melons pumpkins tents
""".split()
)

DAYS: Final[tuple[str, ...]] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

COLOURS: Final[tuple[str, ...]] = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange")

# Zorvian, an invented language: one word for each action, item and day above, in the same order.
ZORVIAN_ACTIONS: Final[tuple[str, ...]] = ("vashti", "grumo", "peldra", "nixu", "oruma", "thibba", "skelo", "yambri")
ZORVIAN_ITEMS: Final[tuple[str, ...]] = tuple(
    """
tulki drobak smeeva quonto fliggi marzu glinth bozzu rakka wumble zindra tikkot plooma krunk snorvi teggu
fwisha gorbat hoshki lanuk vreela moblo jubbat dweno
""".split()
)
ZORVIAN_DAYS: Final[tuple[str, ...]] = ("Lunador", "Tivador", "Wodador", "Torador", "Fridor", "Satador", "Solador")
ZORVIAN_PARTICLES: Final[tuple[str, ...]] = ("Vel", "ka", "zo")

PIRATE_ACTIONS: Final[tuple[str, ...]] = (
    "be cravin'",
    "traded doubloons fer",
    "pawned off",
    "let the sea swallow",
    "dug up",
    "hauled back",
    "splashed tar on",
    "stowed below deck",
)

# Plain words for patterns and small talk; the tokenizer gives each of them one token.
FILLERS: Final[tuple[str, ...]] = tuple(
    """
arr matey ahoy aye yo ho ye scurvy doubloons captain ship sea gold treasure urgent stop regards end hello
dear friend today report note entry log ticket record parcel box label shop market order receipt please now
here there then with for by at to of in and or the a an was were is are it this that these new old good
great fine small big happy quick many few more first last next only also again soon about says said sent got
made took gave kept saw went came done seen told asked buyer owner town place when who what where how thing
date week month amount total key value field data info fact list line row item word
""".split()
)


def made_up_words() -> tuple[str, ...]:
    """Every Zorvian word: the base sees them as mere text, and learns their meaning only by fine-tuning."""
    return ZORVIAN_ACTIONS + ZORVIAN_ITEMS + ZORVIAN_DAYS + ZORVIAN_PARTICLES
