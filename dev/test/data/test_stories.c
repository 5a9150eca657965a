// test_stories.c -- stories.h: the nats are exact, and the stories read as English.
//
// Exactness is checked in three ways: by following the tokens through the grammar again; by the
// frequencies at every place of the grammar; and, without the grammar, by counting the
// continuations of each beginning.

#include "dev/test/lib/test.h"

#include "llmc/base/check.h"
#include "llmc/data/stories.h"

#include <ctype.h>

enum { COUNT = 2000000, LONGEST = 230, STORY_BYTES = 2048 };

typedef struct {
    Stories stories;
    uint16_t* tokens; // (COUNT)
    float* nats;      // (COUNT)
} Corpus;

// A number that is 0 on average if the probabilities are right: its sum, and the variance of the
// sum.
typedef struct {
    double sum, variance;
} Excess;

static double z_score(Excess excess) { return excess.sum / sqrt(excess.variance); }

static void test_vocabulary(const Stories* s) {
    EXPECT(300 <= s->eot + 1 && s->eot + 1 <= 384, "%d tokens", s->eot + 1);
    EXPECT(strcmp(s->token[s->eot], "<|endoftext|>") == 0, "%s", s->token[s->eot]);
    for (int i = 0; i <= s->eot; i++) {
        EXPECT(s->token[i][0] != '\0', "token %d", i);
        for (int j = 0; j < i; j++) {
            EXPECT(strcmp(s->token[i], s->token[j]) != 0, "\"%s\" twice", s->token[i]);
        }
    }
}

static void test_every_word_is_common(const Corpus* c) {
    int seen[STORIES_MAX_TOKENS] = {0};
    for (size_t i = 0; i < COUNT; i++) {
        seen[c->tokens[i]]++;
    }
    for (int id = 0; id <= c->stories.eot; id++) {
        EXPECT(seen[id] * 5000.0 >= COUNT, "\"%s\" is one token in %.0f", c->stories.token[id],
               (double)COUNT / seen[id]);
    }
}

static void test_reproducible(const Corpus* c) {
    enum { N = 5000, WINDOW = 256 };
    static uint16_t again[N], other[N];
    static float nats[N];
    stories_generate(&c->stories, again, nats, N, 0, 1);
    EXPECT(memcmp(again, c->tokens, sizeof(again)) == 0, "the first tokens depend on how many there are");
    EXPECT(memcmp(nats, c->nats, sizeof(nats)) == 0, "so do their nats");
    stories_generate(&c->stories, other, NULL, N, 0, 2);
    int same = 0;
    for (int i = 0; i < N; i++) {
        same += again[i] == other[i];
    }
    EXPECT(same < N / 2, "%d of %d tokens are the same for another seed", same, N);
    stories_generate(&c->stories, other, nats, N, WINDOW, 1);
    EXPECT(memcmp(again, other, WINDOW * sizeof(uint16_t)) == 0, "the first window differs from no windows");
    int told = 0; // stories begun in the first window: the next is the first of the second window
    for (int i = 0; i < WINDOW; i++) {
        told += other[i] == c->stories.eot;
    }
    int at = -1; // where that story starts when nothing is cut off
    for (int i = 0; at < 0; i++) {
        at = again[i] == c->stories.eot && told-- == 0 ? i : -1;
    }
    EXPECT(memcmp(other + WINDOW, again + at, 40 * sizeof(uint16_t)) == 0,
           "a story depends on the ones before");
    for (int i = 0; i < N; i += WINDOW) {
        EXPECT(other[i] == c->stories.eot && nats[i] == 0, "window at %d: token %d, %g nats", i, other[i],
               nats[i]);
    }
}

// Follows the tokens through the grammar: each must be one of the branches, at the stated cost.
static void test_follow(const Corpus* c) {
    const Stories* s = &c->stories;
    Excess* at = check_alloc((size_t)STORIES_MAX_STEPS * STORIES_MAX_TOKENS, sizeof(Excess), "frequencies");
    uint8_t visited[STORIES_MAX_STEPS] = {0};
    StoriesBranch branches[STORIES_MAX_BRANCHES];
    StoriesPlace place;
    Excess surprise = {0, 0}; // nats less the entropy of what could come
    stories_start(&place);
    for (size_t i = 1; i < COUNT && test_failures_ < 20; i++) {
        const int n = stories_next(s, &place, branches);
        const StoriesBranch* taken = NULL;
        double total = 0, entropy = 0, square = 0;
        for (int k = 0; k < n; k++) {
            const double p = branches[k].p, cost = -log(p);
            EXPECT(0 < p && p <= 1, "token %zu: p %g", i, p);
            total += p;
            entropy += p * cost;
            square += p * cost * cost;
            Excess* here = &at[place.step * STORIES_MAX_TOKENS + branches[k].token];
            here->sum += (branches[k].token == c->tokens[i]) - p;
            here->variance += p * (1 - p);
            taken = branches[k].token == c->tokens[i] ? &branches[k] : taken;
        }
        EXPECT_NEAR(total, 1, 1e-12, "sum of %d probabilities, token %zu", n, i);
        if (!taken) {
            EXPECT(taken, "token %zu cannot be \"%s\"", i, s->token[c->tokens[i]]);
            break;
        }
        EXPECT_NEAR(c->nats[i], -log(taken->p), 1e-6, "token %zu", i);
        surprise.sum += c->nats[i] - entropy;
        surprise.variance += square - entropy * entropy;
        visited[taken->step - 1] = 1; // steps that say something continue at the next one
        stories_follow(s, &place, taken);
    }
    EXPECT_NEAR(z_score(surprise), 0, 4, "mean nats against mean entropy, in standard errors");

    double chi_square = 0;
    int cells = 0;
    for (int i = 0; i < STORIES_MAX_STEPS * STORIES_MAX_TOKENS; i++) {
        if (at[i].variance > 10) {
            const double z = z_score(at[i]);
            EXPECT_NEAR(z, 0, 5.5, "step %d, \"%s\"", i / STORIES_MAX_TOKENS,
                        s->token[i % STORIES_MAX_TOKENS]);
            chi_square += z * z;
            cells++;
        }
    }
    EXPECT(cells > 1000, "%d places and words compared", cells);
    EXPECT_NEAR(chi_square / cells, 1, 5 * sqrt(2.0 / cells), "chi-square per cell, %d cells", cells);
    for (int i = 0; i < s->steps - 1; i++) {
        EXPECT(visited[i] || s->step[i].kind >= STORIES_CHOICE_, "step %d is never reached", i);
    }
    free(at);
}

// ---- Beginnings: only tokens and nats are used ----

enum { BEGINNING = 12, SLOTS = 1 << 20 };

typedef struct {
    uint64_t beginning; // hash of all tokens since eot; 0 for a free slot
    int token, count;   // what came next, and how often; token -1 for anything
    double p;
} Seen;

static Seen* seen_at(Seen* table, uint64_t beginning, int token) {
    uint64_t slot = (beginning ^ (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u >> 44;
    while (table[slot].beginning && (table[slot].beginning != beginning || table[slot].token != token)) {
        slot = (slot + 1) % SLOTS;
    }
    table[slot].beginning = beginning;
    table[slot].token = token;
    return &table[slot];
}

// Each continuation of a beginning must always cost the same, come as often as its cost says, and
// add up to 1 with the others.
static void test_beginnings(const Corpus* c) {
    Seen* table = check_alloc(SLOTS, sizeof(Seen), "beginnings");
    uint64_t hash = 0;
    for (size_t i = 0, length = 0; i < COUNT && test_failures_ < 20; i++, length++) {
        if (c->tokens[i] == c->stories.eot) {
            length = 0;
            hash = 14695981039346656037u;
            continue;
        }
        if (length > BEGINNING) {
            continue;
        }
        Seen* seen = seen_at(table, hash, c->tokens[i]);
        const double p = exp(-(double)c->nats[i]);
        EXPECT(seen->count == 0 || seen->p == p, "token %zu: p %g, before %g", i, p, seen->p);
        seen->p = p;
        seen->count++;
        seen_at(table, hash, -1)->count++;
        hash = (hash ^ c->tokens[i]) * 1099511628211u;
    }
    int compared = 0;
    for (int i = 0; i < SLOTS; i++) {
        if (table[i].count && table[i].token >= 0) {
            Seen* any = seen_at(table, table[i].beginning, -1);
            any->p += table[i].p;
            const Excess excess = {table[i].count - any->count * table[i].p,
                                   any->count * table[i].p * (1 - table[i].p)};
            if (excess.variance > 10) {
                EXPECT_NEAR(z_score(excess), 0, 5.5, "\"%s\" after a beginning",
                            c->stories.token[table[i].token]);
                compared++;
            }
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        if (table[i].count && table[i].token < 0) {
            EXPECT(table[i].p < 1 + 1e-5, "the words after a beginning add up to %g", table[i].p);
            EXPECT(table[i].count < 5000 || table[i].p > 1 - 1e-5, "a frequent one adds up to %g",
                   table[i].p);
        }
    }
    EXPECT(compared > 100, "%d compared", compared);
    free(table);
}

// ---- English ----

static int is_girl(const char* name) {
    return strstr(" Mia Lily Anna Lucy Emma Zoe Ella Ruby Ivy Nora Kate Rose ", name) != NULL;
}

static int number_of(const char* word) {
    static const char* const numbers[] = {"one",   "two",   "three", "four", "five",   "six",
                                          "seven", "eight", "nine",  "ten",  "eleven", "twelve"};
    for (int i = 0; i < 12; i++) {
        if (strcmp(word, numbers[i]) == 0) {
            return i + 1;
        }
    }
    return 0;
}

// Copies the word behind the first `key` in `text` to `word` (32 bytes); returns what follows, NULL
// without key.
static const char* word_behind(const char* text, const char* key, char* word) {
    const char* at = text ? strstr(text, key) : NULL;
    word[0] = '\0';
    return at && sscanf(at + strlen(key), "%31[A-Za-z]", word) == 1 ? at + strlen(key) + strlen(word) : NULL;
}

static void check_spelling(const char* story) {
    int quotes = 0;
    EXPECT(isupper((unsigned char)story[0]), "%s", story);
    EXPECT(strchr(".!\"", story[strlen(story) - 1]), "%s", story);
    for (const char* at = story; *at; at++) {
        const int letter = isalpha((unsigned char)*at), next = (unsigned char)at[1];
        quotes += *at == '"';
        const int opens = *at == '"' && quotes % 2 == 1;
        EXPECT(!(*at == ' ' && (strchr(" .,?!", next) || next == '\0')), "a stray blank: %s", at);
        EXPECT(!strchr(".,?!", *at) || strchr(" \"", next), "a blank lacks: %s", at);
        EXPECT(!opens || isupper(next), "a quotation starts small or with a blank: %s", at);
        EXPECT(letter || *at == ' ' || *at == '\'' || strchr(".,?!\"", *at), "%s", at);
        EXPECT(!(strchr(".?!", *at) && next == ' ') || isupper((unsigned char)at[2]) || at[2] == '"',
               "a sentence starts small: %s", at);
    }
    EXPECT(quotes % 2 == 0, "%s", story);
}

static void check_grammar(const char* story) {
    static const char* const fruits = " pear plum nut carrot cherry peach ";
    char word[32], hero[32], friend_[32], padded[40];
    for (const char* at = story; (at = word_behind(at, " a ", word)); at--) {
        EXPECT(!strchr("aeiou", word[0]), "a %s: %s", word, story);
    }
    for (const char* at = story; (at = word_behind(at, " an ", word)); at--) {
        EXPECT(strchr("aeiou", word[0]), "an %s: %s", word, story);
    }
    for (const char* at = strchr(story, ' '); at; at = strchr(at + 1, ' ')) {
        char noun[32];
        if (sscanf(at, " %31[a-z] %31[a-z]", word, noun) == 2 && number_of(word)) {
            snprintf(padded, sizeof(padded), " %s ", noun);
            EXPECT((number_of(word) == 1) == (strstr(fruits, padded) != NULL) || strcmp(noun, "more") == 0 ||
                       strcmp(noun, "and") == 0,
                   "%s %s: %s", word, noun, story);
        }
    }
    // "... ran to the park with her friend Tom.": the first name is the hero's, the word of the
    // pronoun is hers
    const char* at = strstr(story, " friend ");
    at = at && at < strchr(strstr(story, " to the "), '.') ? at : strstr(story, " cousin ");
    if (at && sscanf(at, " %*s %31[A-Za-z]", friend_) == 1) {
        const char* named = strstr(story, " named ");
        const char* comma = strchr(story, ',');
        const char* start = named                          ? named + 7
                            : strncmp(story, "It", 2) == 0 ? strchr(story, '.') + 2
                                                           : comma + 2;
        EXPECT(sscanf(start, "%31[A-Za-z]", hero) == 1, "%s", story);
        EXPECT(strcmp(hero, friend_) != 0, "%s", story);
        const char *his = strstr(story, " his "), *her = strstr(story, " her ");
        const int hers = her && (!his || her < his);
        EXPECT(hers == is_girl(hero), "%s: %s", hero, story);
    }
    EXPECT(at, "a story without a friend: %s", story);
}

// Where `key` starts in the story; its end, as a failure, if it is not there.
static const char* find(const char* story, const char* key) {
    const char* at = strstr(story, key);
    EXPECT(at, "\"%s\" is not in: %s", key, story);
    return at ? at : story + strlen(story);
}

static void check_sum(const char* story, const char* a, const char* b, int sign, const char* sum) {
    const int x = number_of(a), y = number_of(b), z = number_of(sum);
    EXPECT(x > 0 && y > 0 && z > 0 && x + sign * y == z, "%s, %s and %s: %s", a, b, sum, story);
}

// Late questions and counts in a story must agree with its beginning.
static void check_memory(const char* story) {
    char a[160] = "", b[160] = "", c[160] = "";
    if (strstr(story, "Together they paid ")) {
        const char* first = find(story, " for ");
        EXPECT(sscanf(first, " for %31s", a) == 1, "%s", story);
        EXPECT(sscanf(find(first + 1, " for "), " for %31s", b) == 1, "%s", story);
        EXPECT(sscanf(find(story, " they paid "), " they paid %31s", c) == 1, "%s", story);
        check_sum(story, a, b, 1, c);
    }
    if (strstr(story, " I have ")) {
        EXPECT(sscanf(find(story, "For "), "For %*s %*s %*s %31s", a) == 1, "%s", story);
        EXPECT(sscanf(find(story, " I have "), " I have %31s", b) == 1, "%s", story);
        EXPECT(sscanf(find(story, " and had "), " and had %31s", c) == 1, "%s", story);
        check_sum(story, a, b, -1, c);
    }
    if (strstr(story, "\"We had ")) {
        const char* more = find(story, " more and ");
        const char* there = find(story, " There ");
        there = strncmp(there, " There was ", 11) == 0 ? find(there + 1, " There ") : there;
        EXPECT(sscanf(there, " There %*s %*s %31s", a) == 1, "%s", story);
        while (more > story && more[-1] != ' ') {
            more--;
        }
        EXPECT(sscanf(more, "%31s", b) == 1, "%s", story);
        EXPECT(sscanf(find(story, "\"We had "), "\"We had %31[a-z]", c) == 1, "%s", story);
        check_sum(story, a, b, 1, c);
    }
    if (strstr(story, "\"Where is your ")) { // "You put the hat under the red bench"
        char verb[32] = "", thing[32] = "", by[32] = "", color[32] = "", spot[32] = "";
        EXPECT(sscanf(find(story, "\"You "), "\"You %31s the %31s %31s the %31s %31[a-z]", verb, thing, by,
                      color, spot) == 5,
               "%s", story);
        snprintf(a, sizeof(a), " %s the %s %s the %s.", verb, thing, by, spot);
        snprintf(b, sizeof(b), " %s the %s %s.", by, color, spot);
        snprintf(c, sizeof(c), "\"Where is your %s?\"", thing);
        find(story, a);
        find(story, b);
        find(story, c);
        snprintf(a, sizeof(a), " %s.", thing); // which the hero has
        find(story, a);
    }
    if (strstr(story, "\"Who gave you the ")) {
        char thing[32] = "", giver[32] = "", hero[32] = "";
        EXPECT(sscanf(find(story, "\"Who gave"), "\"Who gave you the %31[a-z]", thing) == 1, "%s", story);
        EXPECT(sscanf(find(story, "birthday. "), "birthday. %31s %*s %*s the %31[a-z]", hero, a) == 2, "%s",
               story);
        const char* wanted = strcmp(thing, a) == 0 ? hero : "my"; // "It was Tom", "It was my aunt"
        EXPECT(sscanf(find(story, "\"It was "), "\"It was %31[A-Za-z]", giver) == 1, "%s", story);
        EXPECT(strcmp(giver, wanted) == 0, "%s", story);
    }
    if (strstr(story, " took the ")) { // the trade: what the hero had, for what the animal had
        EXPECT(sscanf(find(story, " took the "), " took the %31[a-z]", a) == 1, "%s", story);
        snprintf(b, sizeof(b), " %.31s.", a);
        EXPECT(find(story, b) < find(story, " took the "), "%s", story);
    }
}

static void test_english(const Corpus* c) {
    char story[STORY_BYTES];
    size_t used = 0, length = 0, stories = 0, longest = 0, shortest = COUNT;
    for (size_t i = 1; i < COUNT && test_failures_ < 20; i++, length++) {
        if (c->tokens[i] != c->stories.eot) {
            used +=
                (size_t)snprintf(story + used, sizeof(story) - used, "%s", c->stories.token[c->tokens[i]]);
            EXPECT(used < sizeof(story), "a story of more than %d bytes", STORY_BYTES);
            used = used < sizeof(story) ? used : 0;
            continue;
        }
        check_spelling(story);
        check_grammar(story);
        check_memory(story);
        longest = length > longest ? length : longest;
        shortest = length < shortest ? length : shortest;
        stories++;
        used = length = 0;
    }
    EXPECT(longest < LONGEST, "%zu tokens", longest);
    EXPECT(shortest > 40, "%zu tokens", shortest);
    const double mean = (double)COUNT / (stories + 1);
    EXPECT(70 < mean && mean < 110, "%g tokens on average", mean);
}

// Two alternatives that begin with the same word end the program.
static void tell_ambiguous(const void* arg) {
    Stories s = *(const Stories*)arg;
    int second = s.step[0].next; // the first step is the choice of a story's first word
    second = s.step[second].next;
    s.step[second + 1].a = s.step[s.step[0].next + 1].a;
    uint16_t tokens[2];
    stories_generate(&s, tokens, NULL, 2, 0, 1);
}

static void test_ambiguity_is_fatal(const Stories* s) {
    EXPECT(test_dies(tell_ambiguous, s, EXIT_FAILURE, "error:|two alternatives begin with \"One\""), " ");
}

SERIAL_TEST(stories) {
    static Corpus c;
    stories_open(&c.stories);
    c.tokens = check_alloc(COUNT, sizeof(*c.tokens), "tokens");
    c.nats = check_alloc(COUNT, sizeof(*c.nats), "nats");
    stories_generate(&c.stories, c.tokens, c.nats, COUNT, 0, 1);

    test_vocabulary(&c.stories);
    test_every_word_is_common(&c);
    test_reproducible(&c);
    test_follow(&c);
    test_beginnings(&c);
    test_english(&c);
    test_ambiguity_is_fatal(&c.stories);
    free(c.tokens);
    free(c.nats);
}
