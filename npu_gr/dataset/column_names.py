"""Names of columns by their role, as tools, data sets and shops have them."""

from __future__ import annotations

# Names of columns, letters and digits only, without accents: strong ones, then weak ones, which
# count if no column has a strong one.
NAMES: dict[str, tuple[str, str]] = {
    "user": (
        "userid user uid customerid customer customerno customernumber visitorid visitor "
        "memberid member accountid clientid client reviewerid buyerid subscriberid shopperid "
        "profileid userpseudoid userkey customerkey externaluserid kunnr "
        "useruuid personid distinctid "
        "nutzer nutzerid kunde kundenid kundennummer kundennr benutzer benutzerid "
        "utilisateur idutilisateur idclient identifiantclient codeclient numeroclient "
        "usuario idusuario usuarioid cliente idcliente clienteid utente idutente utenteid "
        "ユーザーid ユーザid 会員番号 顧客id 顧客番号 пользователь покупатель клиент "
        "用户 用户id 用户编号 会员 会员id 会员编号 客户 客户id 顾客id 买家id",
        "householdid householdkey anonymousid fullvisitorid cookieid deviceid sessionid session "
        "domainuserid username externalid "
        "email useremail customeremail emailbilling billingemail",
    ),
    "item": (
        "itemid item iid sku skuid productid product asin articleid article movieid contentid "
        "trackid songid videoid bookid isbn listingid offerid newsid postid adid documentid "
        "docid stockcode productcode productsku itemsku recipeid gameid filmid businessid "
        "aid lineitemsku matnr goodid goodsid "
        "artikel artikelid artikelnummer artikelnr produkt produktid "
        "produktnummer produit idproduit produitid codeproduit referenceproduit idarticle "
        "producto idproducto productoid articulo idarticulo prodotto idprodotto prodottoid "
        "articolo produto idproduto produtoid 商品番号 商品コード アイテムid товар идтовара "
        "商品 商品id 商品编号 商品编码 物品id 物品 产品id 视频id 文章id 内容id 歌曲id 电影id",
        "parentasin productkey itemkey variantid artistid",
    ),
    "time": (
        "timestamp time ts eventtime eventtimestamp createdat datetime occurredat unixreviewtime "
        "timestampms timestampus timestampns timems eventts eventtimems orderts ordertime "
        "dateadded transactiontimestamp zeit zeitstempel zeitpunkt horodatage dateheure "
        "dateetheure fechahora fechayhora dataora dataeora datahora датаивремя "
        "日時 タイムスタンプ 購入日時 注文日時 时间 时间戳 行为时间 下单时间 点击时间",
        "date eventdate receivedat sentat updatedat invoicedate tdat orderdate purchasedate "
        "reviewtime transactiondt transactiondate orderdatekey erdat "
        "day datum bestelldatum dt tstamp collectortstamp derivedtstamp fecha "
        "время дата 日期 日付",
    ),
    "event": (
        "event eventtype eventname action actiontype behavior behaviour behaviortype "
        "behaviourtype interaction interactiontype activity "
        "ereignis aktion aktivitat evenement typeevenement typedevenement evento tipoevento "
        "tipodeevento accion イベント アクション событие 行为 行为类型 事件 事件类型 动作 操作类型",
        "type verb",
    ),
    "value": (
        "rating ratings stars score overall value dwelltime dwell dwells dwellms dwellseconds "
        "watchtime watchratio playtime listeningtime engagement bookrating userrating "
        "bewertung sterne verweildauer 评分 分数 时长 观看时长 停留时长",
        "duration preference label",
    ),
    "position": ("position displayposition shownposition 位置", "pos rank slot itemposition"),
    "title": (
        "title name productname movietitle itemname producttitle itemtitle displayname "
        "titel bezeichnung artikelname produktname 标题 名称 商品名称 商品标题",
        "label headline",
    ),
}
ALL_NAMES = frozenset(name for both in NAMES.values() for names in both for name in names.split())
IS_A = {
    "user": "who did it",
    "item": "with which item",
    "time": "when",
    "event": "what was done",
    "value": "how much",
    "title": "what a person calls it",
    "position": "its place among those shown",
}
