/*
stories.h -- the built-in corpus: an endless stream of small stories whose entropy is known exactly.

The stories come from a probabilistic grammar, the two tables below. At every step the grammar knows
each token that may come next and its probability, and draws one of them. The mean of -log p of the
drawn tokens is the floor that no language model can beat. It is exact because no two continuations
start with the same token (stories_next checks this at every step): no choice stays hidden, so p is
the probability of the token given all tokens before it.

Tokens are words and punctuation marks; their strings, stories.token[id], include leading blanks ("
Tom", "."), so that concatenating them gives the text. The last id, stories.eot, precedes every
story; there are stories.eot + 1 tokens.
*/
#ifndef LLMC_STORIES_H
#define LLMC_STORIES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off

// Words. Left: the variables that draw from a list, without replacement within a story. Right: the
// words, the most likely first. After a slash stands a second word that belongs to the first: the
// pronoun of a name, the plural of a fruit, the preposition of a place.
static const char *const stories_lists_[][2] = {
    {"number", "one two three four five six seven eight nine ten eleven twelve"}, // first, in this order
    {"many", "five six four seven"},
    {"more", "three two four five"},
    {"few", "two three one"},
    {"count", "ten twelve seven nine eight eleven"},
    {"hero friend",
     "Tom/he Mia/she Ben/he Lily/she Sam/he Anna/she Max/he Lucy/she Leo/he Emma/she Jack/he Zoe/she Tim/he "
     "Ella/she Finn/he Ruby/she Noah/he Ivy/she Dan/he Nora/she Hugo/he Kate/she Oscar/he Rose/she"},
    {"elder", "mother father grandmother grandfather aunt uncle"},
    {"trait trait2 trait3", "kind brave clever funny curious shy cheerful quiet gentle polite merry sleepy"},
    {"time", "day morning afternoon evening"},
    {"weather", "sunny rainy windy snowy cloudy foggy frosty stormy warm cold"},
    {"go go2", "went walked ran hurried raced wandered skipped danced"},
    {"place place2",
     "park/in beach/at garden/in farm/on forest/in river/at lake/at hill/on castle/in market/at village/in "
     "meadow/in school/at mill/at zoo/at barn/in cave/in"},
    {"by by2 by3", "under behind near beside"},
    {"spot spot2 spot3", "tree bush bench bridge rock table cart log ladder barrel tent wagon boat"},
    {"state state2", "old tall wooden broken round dusty hollow mossy painted crooked"},
    {"look look2 look3", "little big shiny tiny pretty lovely strange funny new nice"},
    {"color color2 color3", "red blue green yellow white golden brown pink silver purple black gray"},
    {"thing thing2 thing3",
     "ball kite book boat drum doll hat lamp bell key cup ring scarf map flute rope spoon blanket mirror "
     "candle clock whistle puppet robot train shell feather crown pillow"},
    {"bucket", "basket bucket box bag jar pot"},
    {"animal", "dog cat fox rabbit bear duck frog mouse goat pig crow turtle squirrel wolf donkey"},
    {"fruit", "pear/pears plum/plums nut/nuts carrot/carrots cherry/cherries"},
    {"dish dish2", "soup bread cake cheese pie honey rice jam"},
    {"glad", "happy glad proud cheerful thankful merry"},
    {"tired", "tired hungry sleepy thirsty"},
    {"play play2 play3 play4",
     "played sang danced laughed jumped talked rested skipped smiled hummed giggled"},
    {"hid", "hid left put dropped"},
    {"adverb", "softly happily quickly loudly kindly slowly proudly gently gladly warmly sadly"},
};

// Rules; a story is the first one. Their text may contain
//     [a|b|c]        one of the three, equally likely, or with weights up to 9: [3 a|2 b|c]; may be empty
//     {thing}        a word drawn at its first mention and repeated at every later one
//     {any thing}    a fresh word each time
//     {hero.he/she}  the one or the other, by the hero's pronoun
//     {place.in}     the second word of an entry, whatever its name after the dot
//     {fruit.n}      singular or plural, as the last number demands
//     {many+more}    the sum (or the difference) of two numbers
//     <home>         another rule
// Two alternatives must not start with the same word; an empty one starts with whatever follows the
// bracket.
static const char *const stories_rules_[][2] = {
    {"story", "<opening> <scene>[<lost>|<seek>|<gift>|<add>|<share>|<help>|<trade>|<shop>]"},
    {"opening",
     "[4 One {weather} {time}, {hero}"
     "|3 On a {weather} {time}, {hero}"
     "|2 It was a {weather} {time}. {hero}"
     "|Once there was a {trait} child named {hero}. One {weather} {time}, {hero.he/she}] "
     "{go} to the {any look} {place} [2 with|to meet|and met] {hero.his/her} "
     "[2 friend|cousin|4 {trait2} friend] {friend}. {hero.He/She} <had> a {look} {color} {thing}."},
    {"scene",
     "[4 A {trait3} {animal} {play} {by} the {state} {spot}. "
     "|2 They <met> a {trait3} {animal} {by} the {state} {spot}. "
     "|2 There was a {trait3} {animal} {by} the {state} {spot}. ]"},
    {"lost",
     "{hero} {hid} the {thing} {by} the {spot}. "
     "[Then|Soon|Later] they {play2} and {play3} with the {animal}. "
     "\"Where is your {thing}?\" <asked> {friend}<how>. "
     "<they> <looked> {by2} the {state2} {spot2} and <found> a {look2} {any color} {thing2}. "
     "\"You {hid} the {thing} {by} the {state} {spot},\" {friend.he/she} <said><how>. "
     "<home> {hero.He/She} [was|felt] {glad} and never lost the {color} {thing} again."},
    {"seek",
     "\"Hide and seek,\" <said> {friend}<how>. {friend.He/She} hid {by} the {spot} with the {animal}. "
     "{hero} counted to {count} and <looked> {by2} the {state2} {spot2}, "
     "but <found> only a {look2} {any color} {thing2}. "
     "\"I see you {by} the {state} {spot},\" {hero.he/she} <said><how>. "
     "<home> It was a [good|long|funny|lovely|merry|strange] game."},
    {"gift",
     "It was {friend}'s birthday. {hero} <gave> {friend.him/her} the {thing}. "
     "{friend.His/Her} {elder} <gave> {friend.him/her} a {look2} {color2} {thing2} and a {any fruit}. "
     "[{friend.He/She} was {glad} and {play2}<how>. |]"
     "\"Who gave you the [{thing}?\" <asked> the {animal}<how>. \"It was {hero}"
     "|{thing2}?\" <asked> the {animal}<how>. \"It was my {elder}],\" {friend.he/she} <said><how>. "
     "<home> That night {friend.he/she} [slept|rested] with the {color} {thing} "
     "[{by2} the {any color} bed|in {friend.his/her} arms]."},
    {"add",
     "There {hero} [found|picked] {many} {any look} {fruit.n} {by} the {spot}. "
     "{friend} [found|picked|bought] {more} more and [put|left|hid] them in a {look2} {color2} {bucket}. "
     "[They {play2} and {play3} with the {animal}. |The {animal} came and got one {fruit}. |]"
     "\"How many {fruit.s} did we have?\" <asked> {friend}<how>. "
     "\"We had {many+more},\" {hero.he/she} <said><how>. "
     "<home> Now the {look2} {color2} {bucket} was empty."},
    {"share",
     "For [lunch|dinner], {hero} [had|brought|packed] "
     "{many} {any look} {fruit.n} in a {look2} {color2} {bucket}. "
     "{friend} [was {any tired}|had [none|only {any dish}]]. "
     "\"[May|Can] I have {few} {fruit.n}, please?\" {friend.he/she} <asked><how>. "
     "{hero} gave {friend.him/her} {few} and had {many-few} {fruit.n} left. "
     "<they> [2 sat|rested|played] {by} the {spot} with the {animal}. "
     "<home> It is [good|nice|lovely] to share."},
    {"help",
     "Soon the {animal} was [sad|sorry]. \"I lost my {look2} {color2} {thing2},\" "
     "<said> the {animal}<how>. <they> {go2} to the {any look} {place2}, "
     "<looked> {by2} the {state2} {spot2} and found the {thing2}. "
     "\"It was {place2.in} the {place2}, {by2} the {state2} {spot2},\" <said> [{hero}|{friend}]<how>. "
     "<home> Now the {animal} was {glad}."},
    {"trade",
     "The {animal} had a {look2} {color2} {thing2}. \"Will you [trade|swap]?\" <asked> the {animal}<how>. "
     "\"[3 [2 Yes|Sure],\" {hero.he/she} <said><how>. The {animal} took the {thing} and {play2}<how>. "
     "<question> \"A {look2} {color2} {thing2}"
     "|2 No,\" {hero.he/she} <said><how>. The {animal} was [sad|sorry]. "
     "<question> \"My {look} {color} {thing}],\" {hero.he/she} <said><how>."},
    {"shop",
     "In a {any look} shop, {hero} <bought> a {look2} {color2} {thing2} for {many} coins. "
     "{friend} <bought> a {look3} {color3} {thing3} for {more} coins. "
     "[<they> were {glad} and {play2} with the {animal}. |]"
     "\"What did [you buy?\" <asked> {hero.his/her} {elder}<how>. \"A {look2} {color2} {thing2}"
     "|{friend} buy?\" <asked> {hero.his/her} {elder}<how>. \"A {look3} {color3} {thing3}],\" "
     "{hero.he/she} <said><how>. "
     "<home> Together they paid {many+more} coins."},
    {"home",
     "[4 [2 Then|Soon|Later] they {any go} home and ate {dish} and {dish2}."
     "|What a [good|long|funny|lovely|merry|strange] {time} {place.in} the {place}!"
     "|2 <they> felt {any tired} [and|but] {any glad}."
     "|3]"},
    {"question",
     "[At home|Later|That night] {hero.his/her} {elder} <asked><how>, \"What do you have there?\""},
    {"met", "[2 met|saw|found]"},
    {"they", "[They|Both]"},
    {"had", "[had|carried|owned]"},
    {"gave", "[gave|brought|made]"},
    {"bought", "[bought|got|chose]"},
    {"looked", "[looked|searched|peeked]"},
    {"found", "[found|saw|noticed]"},
    {"said", "[3 said|cried|called|whispered|shouted|laughed|sang|giggled]"},
    {"asked", "[2 asked|cried|called|whispered]"},
    {"how", "[4 {any adverb}|]"},
};

// ---- The tables in memory ----

enum {
    STORIES_MAX_NAME = 16, // longest token or name in the tables, including the final 0
    STORIES_MAX_TOKENS = 384,
    STORIES_MAX_ENTRIES = 384,
    STORIES_MAX_VARIABLES = 64,
    STORIES_MAX_STEPS = 4096,
    STORIES_MAX_BRANCHES = 64,
    STORIES_LISTS = sizeof(stories_lists_) / sizeof(stories_lists_[0]),
    STORIES_RULES = sizeof(stories_rules_) / sizeof(stories_rules_[0]),
};

typedef char StoriesName_[STORIES_MAX_NAME];

// Steps of the program that the rules become, with included rules expanded in place.
typedef enum {
    STORIES_SAY_, // token a
    STORIES_SUM_, // the number of variable a plus c times the number of b, where c is 1 or -1
    STORIES_ANY_, // a word of the list
    STORIES_WORD_, // the word of variable a, drawn from the list if it has none yet
    STORIES_SECOND_, // its second word
    STORIES_COUNTED_, // its word if the last number is one, else its second word, the plural
    STORIES_PRONOUN_, // its pronoun: token b or c
    STORIES_CHOICE_, // one of the alternatives; step `next` is the first
    STORIES_ALTERNATIVE_, // an alternative of probability p; step `next`: the next one, 0: none
    STORIES_GOTO_, // jumps to step `next`
} StoriesKind_;

typedef struct {
    StoriesKind_ kind;
    int a, b, c, list;
    int next; // next step
    double p;
} StoriesStep_;

typedef struct {
    int word, second; // tokens
    double weight; // its probability is proportional to this
} StoriesEntry_;

typedef struct {
    int eot;
    int tokens, variables, steps;
    StoriesName_ token[STORIES_MAX_TOKENS];
    int value[STORIES_MAX_TOKENS]; // value of a number; 0 for other words
    StoriesName_ variable[STORIES_MAX_VARIABLES];
    int variable_list[STORIES_MAX_VARIABLES];
    StoriesEntry_ entry[STORIES_MAX_ENTRIES];
    int list[STORIES_LISTS + 1]; // list l is the entries list[l] to list[l + 1] - 1
    StoriesStep_ step[STORIES_MAX_STEPS];
    int no_blank; // while reading: the next word opens the story or a quotation
} Stories;

// Reads the tables. Allocates nothing.
void stories_open(Stories* s);

// ---- Telling stories ----

// Position in a story: everything that its tokens so far have settled.
typedef struct {
    int step;                           // the next step
    int number;                         // the number said last
    int entry[STORIES_MAX_VARIABLES]; // entry that a variable has drawn, -1 if none yet
    uint8_t taken[STORIES_MAX_ENTRIES]; // 1 if a variable has drawn it
} StoriesPlace;

// One continuation: a token, its probability, and the choices that it settles.
typedef struct {
    int token;
    double p;
    int step;            // the next one
    int variable, entry; // entry that the variable draws; variable -1 if none
} StoriesBranch;

// Moves to the position after an eot, before the first word of a story.
void stories_start(StoriesPlace* place);

// Sets branches (STORIES_MAX_BRANCHES) to all continuations and returns their number. Their
// probabilities add up to 1, and their tokens differ.
int stories_next(const Stories* s, const StoriesPlace* place, StoriesBranch* branches);

void stories_follow(const Stories* s, StoriesPlace* place, const StoriesBranch* branch);

// Fills tokens (count) with eot, story, eot, story, ..., the last one cut off, and nats (count, may
// be NULL) with -log p(token | all tokens before it). Story number k is made from stream k of the
// seed.
//
// If `window` is not 0, a story is also cut off at every multiple of `window` tokens and the next
// one starts there; its eot costs 0, because its position tells it. A model that sees one window at
// a time then misses no start of a story, so it can reach the floor.
void stories_generate(const Stories* s, uint16_t* tokens, float* nats, size_t count, size_t window, uint64_t seed);

#ifdef __cplusplus
}
#endif

#ifdef STORIES_IMPLEMENTATION

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/rand.h"

// ---- The tables in memory ----

// Copies the first `length` bytes of `text` to `name`. Returns what follows them.
static const char* stories_name_(char* name, const char* text, size_t length) {
    CHECK(0 < length && length < STORIES_MAX_NAME, "stories: wanted a name of 1 to %d bytes at \"%.40s\"",
          STORIES_MAX_NAME - 1, text);
    memcpy(name, text, length);
    name[length] = '\0';
    return text + length;
}

// Returns the index of the name among these; n if it is not there.
static int stories_find_(const StoriesName_* names, int n, const char* name) {
    int i = 0;
    while (i < n && strcmp(names[i], name) != 0) {
        i++;
    }
    return i;
}

static int stories_variable_(const Stories* s, const char* name) {
    const int variable = stories_find_(s->variable, s->variables, name);
    CHECK(variable < s->variables, "stories: no variable is called \"%s\"", name);
    return variable;
}

// Returns the id of the token `blank` + `word`, which is added if it is new.
static int stories_token_(Stories* s, const char* blank, const char* word) {
    char string[STORIES_MAX_NAME + 1];
    snprintf(string, sizeof(string), "%s%s", blank, word);
    const int id = stories_find_(s->token, s->tokens, string);
    if (id == s->tokens) {
        CHECK(id < STORIES_MAX_TOKENS, "stories: more than %d tokens", STORIES_MAX_TOKENS);
        stories_name_(s->token[s->tokens++], string, strlen(string));
    }
    return id;
}

static void stories_read_list_(Stories* s, int list) {
    StoriesName_ name;
    for (const char* at = stories_lists_[list][0]; *at; at += *at == ' ') {
        CHECK(s->variables < STORIES_MAX_VARIABLES, "stories: more than %d variables", STORIES_MAX_VARIABLES);
        s->variable_list[s->variables] = list;
        at = stories_name_(s->variable[s->variables++], at, strcspn(at, " "));
    }
    StoriesEntry_ *first = &s->entry[s->list[list]], *entry = first;
    for (const char* at = stories_lists_[list][1]; *at; at += *at == ' ') {
        CHECK(entry < s->entry + STORIES_MAX_ENTRIES, "stories: more than %d words", STORIES_MAX_ENTRIES);
        at = stories_name_(name, at, strcspn(at, " /"));
        entry->word = entry->second = stories_token_(s, " ", name);
        if (*at == '/') {
            at = stories_name_(name, at + 1, strcspn(at + 1, " "));
            entry->second = stories_token_(s, " ", name);
        }
        entry++;
    }
    const int n = (int)(entry - first);
    // the first word of a long list is nearly five times as likely as the last
    for (int rank = 0; rank < n; rank++) {
        first[rank].weight = 1 / (0.25 * n + rank + 1);
    }
    s->list[list + 1] = s->list[list] + n;
}

static StoriesStep_* stories_step_(Stories* s, StoriesKind_ kind) {
    CHECK(s->steps < STORIES_MAX_STEPS, "stories: the rules have more than %d steps", STORIES_MAX_STEPS);
    StoriesStep_* step = &s->step[s->steps++];
    step->kind = kind;
    step->next = s->steps;
    return step;
}

// Each function below reads one construct of a rule's text, adds its steps and returns the text
// after it.
static const char* stories_read_text_(Stories* s, const char* text);

// Reads what follows the '[' of "[a|b|c]".
static const char* stories_read_choice_(Stories* s, const char* text) {
    const int choice = s->steps, no_blank = s->no_blank;
    double total = 0;
    StoriesStep_* last = stories_step_(s, STORIES_CHOICE_);
    do {
        last->next = s->steps;
        last = stories_step_(s, STORIES_ALTERNATIVE_);
        last->p = isdigit((unsigned char)*text) ? *text++ - '0' : 1;
        total += last->p;
        s->no_blank = no_blank;
        text = stories_read_text_(s, text);
        stories_step_(s, STORIES_GOTO_);
    } while (*text++ == '|');
    CHECK(text[-1] == ']', "stories: a '[' lacks its ']'");
    last->next = 0;
    // jumps from the end of each alternative to after the ']'
    for (int i = choice + 1, next; i; i = next) {
        next = s->step[i].next;
        s->step[i].p /= total;
        s->step[(next ? next : s->steps) - 1].next = s->steps;
    }
    return text;
}

// Reads what follows the dot of {hero.he/she}, {fruit.n} or {place.in}.
static void stories_read_form_(Stories* s, StoriesStep_* step, char* form) {
    char* slash = strchr(form, '/');
    if (slash) {
        *slash = '\0';
        step->kind = STORIES_PRONOUN_;
        step->b = stories_token_(s, " ", form);
        step->c = stories_token_(s, " ", slash + 1);
    } else {
        step->kind = strcmp(form, "n") == 0 ? STORIES_COUNTED_ : STORIES_SECOND_;
    }
}

// Reads what follows the '{' of "{thing}", "{any thing}", "{place.in}" or "{many+more}".
static const char* stories_read_mention_(Stories* s, const char* text) {
    CHECK(!s->no_blank, "stories: {%.20s opens a story or a quotation, but its words have a blank", text);
    StoriesName_ name, form;
    StoriesStep_* step = stories_step_(s, STORIES_WORD_);
    if (strncmp(text, "any ", 4) == 0) {
        step->kind = STORIES_ANY_;
        text += 4;
    }
    text = stories_name_(name, text, strcspn(text, "}.+-"));
    step->a = stories_variable_(s, name);
    step->list = s->variable_list[step->a];
    const char mark = *text++;
    if (mark == '}') {
        return text;
    }
    text = stories_name_(form, text, strcspn(text, "}")) + 1;
    if (mark == '.') {
        stories_read_form_(s, step, form);
    } else {
        step->kind = STORIES_SUM_;
        step->b = stories_variable_(s, form);
        step->c = mark == '+' ? 1 : -1;
    }
    return text;
}

// Reads what follows the '<' of "<home>".
static const char* stories_read_include_(Stories* s, const char* text) {
    StoriesName_ name;
    text = stories_name_(name, text, strcspn(text, ">"));
    int rule = 0;
    while (rule < STORIES_RULES && strcmp(stories_rules_[rule][0], name) != 0) {
        rule++;
    }
    CHECK(rule < STORIES_RULES, "stories: no rule is called \"%s\"", name);
    stories_read_text_(s, stories_rules_[rule][1]);
    return text + 1;
}

// Reads a word or a mark ("'s" is one). A quotation mark opens if something follows it directly,
// else it closes.
static const char* stories_read_word_(Stories* s, const char* text) {
    StoriesName_ word;
    const int letter = isalpha((unsigned char)*text) != 0;
    const int opens = *text == '"' && text[1] && !strchr(" |]", text[1]);
    const size_t more = letter || *text == '\'' ? strcspn(text + 1, " ,.?!'\"[|]{<") : 0;
    text = stories_name_(word, text, 1 + more);
    stories_step_(s, STORIES_SAY_)->a = stories_token_(s, opens || (letter && !s->no_blank) ? " " : "", word);
    s->no_blank = opens;
    return text;
}

// Reads up to the end of the text or of the alternative.
static const char* stories_read_text_(Stories* s, const char* text) {
    while (*text && *text != '|' && *text != ']') {
        // clang-format off
        switch (*text) {
        case ' ': text++; break;
        case '[': text = stories_read_choice_(s, text + 1); break;
        case '{': text = stories_read_mention_(s, text + 1); break;
        case '<': text = stories_read_include_(s, text + 1); break;
        default:  text = stories_read_word_(s, text);
        }
        // clang-format on
    }
    return text;
}

void stories_open(Stories* s) {
    memset(s, 0, sizeof(*s));
    for (int list = 0; list < STORIES_LISTS; list++) {
        stories_read_list_(s, list);
    }
    for (int number = 1; number <= s->list[1]; number++) {
        s->value[s->entry[number - 1].word] = number;
    }
    s->no_blank = 1;
    stories_read_text_(s, stories_rules_[0][1]);
    s->eot = stories_token_(s, "", "<|endoftext|>");
    stories_step_(s, STORIES_SAY_)->a = s->eot;
}

// ---- Telling stories ----

void stories_start(StoriesPlace* place) {
    memset(place, 0, sizeof(*place));
    memset(place->entry, -1, sizeof(place->entry));
}

static int stories_sum_(const Stories* s, const StoriesPlace* place, const StoriesStep_* step) {
    const int a = place->entry[step->a], b = place->entry[step->b];
    CHECK(a >= 0 && b >= 0, "stories: a sum of %s and %s before both are known", s->variable[step->a],
          s->variable[step->b]);
    const int sum = s->value[s->entry[a].word] + step->c * s->value[s->entry[b].word];
    CHECK(1 <= sum && sum <= s->list[1], "stories: a sum is %d, wanted 1 to %d", sum, s->list[1]);
    return s->entry[sum - 1].word;
}

// Returns the token of a step, for an entry if it concerns one.
static int stories_said_(const Stories* s, const StoriesPlace* place, const StoriesStep_* step,
                         const StoriesEntry_* entry) {
    // clang-format off
    switch (step->kind) {
    case STORIES_SAY_:     return step->a;
    case STORIES_SUM_:     return stories_sum_(s, place, step);
    case STORIES_SECOND_:  return entry->second;
    case STORIES_COUNTED_: return place->number == 1 ? entry->word : entry->second;
    case STORIES_PRONOUN_: return strcmp(s->token[entry->second], " he") == 0 ? step->b : step->c;
    default:               return entry->word;
    }
    // clang-format on
}

// Appends everything that a step may say to the n branches, with probability p in all: one branch
// for each entry that may be drawn, or a single one if nothing is left to draw. Returns the new
// number.
static int stories_words_(const Stories* s, const StoriesPlace* place, const StoriesStep_* step, double p,
                          StoriesBranch* branches, int n) {
    const int variable = step->kind >= STORIES_WORD_ ? step->a : -1;
    const int known = step->kind < STORIES_ANY_ || (variable >= 0 && place->entry[variable] >= 0);
    const int all = known || variable < 0;
    int first = s->list[step->list], end = s->list[step->list + 1];
    if (known) {
        first = variable < 0 ? 0 : place->entry[variable];
        end = first + 1;
    }
    double total = 0;
    for (int e = first; e < end; e++) {
        total += all || !place->taken[e] ? s->entry[e].weight : 0;
    }
    for (int e = first; e < end; e++) {
        if (all || !place->taken[e]) {
            CHECK(n < STORIES_MAX_BRANCHES, "stories: more than %d ways to continue", STORIES_MAX_BRANCHES);
            const StoriesBranch branch = {stories_said_(s, place, step, &s->entry[e]),
                                          p * (s->entry[e].weight / total), step->next, variable, e};
            branches[n++] = branch;
        }
    }
    return n;
}

// Appends all continuations from step `at`, which is reached with probability p.
static int stories_ways_(const Stories* s, const StoriesPlace* place, int at, double p,
                         StoriesBranch* branches, int n) {
    const StoriesStep_* step = &s->step[at];
    if (step->kind == STORIES_GOTO_) {
        return stories_ways_(s, place, step->next, p, branches, n);
    }
    if (step->kind != STORIES_CHOICE_) {
        return stories_words_(s, place, step, p, branches, n);
    }
    for (int i = step->next; i; i = s->step[i].next) {
        n = stories_ways_(s, place, i + 1, p * s->step[i].p, branches, n);
    }
    return n;
}

int stories_next(const Stories* s, const StoriesPlace* place, StoriesBranch* branches) {
    uint8_t said[STORIES_MAX_TOKENS] = {0};
    const int n = stories_ways_(s, place, place->step, 1, branches, 0);
    for (int i = 0; i < n && n > 1; i++) {
        const int token = branches[i].token;
        CHECK(!said[token], "stories: two alternatives begin with \"%s\"", s->token[token]);
        said[token] = 1;
    }
    return n;
}

void stories_follow(const Stories* s, StoriesPlace* place, const StoriesBranch* branch) {
    if (branch->token == s->eot) {
        stories_start(place);
        return;
    }
    place->step = branch->step;
    if (s->value[branch->token]) {
        place->number = s->value[branch->token];
    }
    if (branch->variable >= 0) {
        place->entry[branch->variable] = branch->entry;
        place->taken[branch->entry] = 1;
    }
}

// Draws one of the n branches.
static const StoriesBranch* stories_draw_(const StoriesBranch* branches, int n, Rand* rng) {
    double u = n > 1 ? rand_uniform(rng) : 0;
    int i = 0;
    while (i < n - 1 && u >= branches[i].p) {
        u -= branches[i++].p;
    }
    return &branches[i];
}

void stories_generate(const Stories* s, uint16_t* tokens, float* nats, size_t count, size_t window,
                      uint64_t seed) {
    StoriesBranch branches[STORIES_MAX_BRANCHES];
    StoriesPlace place;
    Rand rng = rand_open(seed, 0);
    uint64_t story = 0;
    stories_start(&place);
    for (size_t i = 0; i < count; i++) {
        const StoriesBranch cut = {s->eot, 1, 0, -1, 0};
        const StoriesBranch* branch = &cut;
        if (i > 0 && (window == 0 || i % window > 0)) {
            branch = stories_draw_(branches, stories_next(s, &place, branches), &rng);
        }
        stories_follow(s, &place, branch);
        if (branch->token == s->eot) {
            rng = rand_open(seed, story++);
        }
        tokens[i] = (uint16_t)branch->token;
        if (nats) {
            nats[i] = (float)log(1 / branch->p);
        }
    }
}

#endif // STORIES_IMPLEMENTATION

#endif
